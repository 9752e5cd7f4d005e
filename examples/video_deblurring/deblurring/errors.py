"""What a user can set right: reported in one message, without a traceback."""


class TrainerError(Exception):
    """Bad options, missing data, checkpoints that do not fit: what was expected, what was found, what to do."""
