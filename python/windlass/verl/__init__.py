"""Weight sync of verl by Windlass: ``actor_rollout_ref.rollout.checkpoint_engine.backend=windlass``.

The entry point of ``verl.plugins`` is :mod:`windlass.verl.plugin`; nothing has to be imported. For trainers and rollouts that do not
share GPUs; docs/verl.md has the options. Importing this package imports neither verl nor torch.
"""
