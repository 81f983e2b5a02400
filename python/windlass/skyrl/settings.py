"""The names that choose and configure Windlass in SkyRL.

Owns: constants. Called by all of this package, also in workers that never sync. Must not: import anything.
"""

__all__ = ["BACKEND", "SETTINGS", "VARIABLE"]

#: The name that a configuration gives.
BACKEND = "windlass"
#: Settings as JSON, for the workers that Ray starts.
VARIABLE = "WINDLASS_SKYRL"
#: What settings there are.
SETTINGS = ("model_id", "image_dir", "checkpoint", "manager", "timeout")
