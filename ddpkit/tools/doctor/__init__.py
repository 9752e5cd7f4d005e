"""Find the faults of a machine or a job."""
