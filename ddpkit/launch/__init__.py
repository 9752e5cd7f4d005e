"""Read from the environment and the process tree how this process was started, and its rank."""
