"""How much of the time the engine works in serial, sync and async rollout (`rollout.mode`), where
the idle seconds come from, and how far from the best possible each is."""
