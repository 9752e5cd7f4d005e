"""The command `ddpkit where`: what each rank of a running job is doing."""
