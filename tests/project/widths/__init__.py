"""A package of the project, imported as it lies beside the script."""


def width() -> int:
    return 8
