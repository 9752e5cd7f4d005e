"""A diffusion policy for a robot arm: demonstrations, training on any number of ranks, rollouts."""
