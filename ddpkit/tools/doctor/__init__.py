"""Find what is wrong with a machine or a job."""
