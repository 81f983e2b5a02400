"""The engine host's side: an image of a model that follows its trainer. Its doors are :class:`windlass.Receiver` and
:class:`windlass.Follower`."""
