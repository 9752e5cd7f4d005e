"""What happens when a rank fails: a table of cases, run by the tests and by `python -m tests.faults`."""
