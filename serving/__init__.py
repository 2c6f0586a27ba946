"""Engine, scheduler and HTTP API over the model of `glm_jax`."""
