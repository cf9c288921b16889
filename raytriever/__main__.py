"""``python -m raytriever``: the command."""

import sys


def main() -> None:
    """The command; where Raytriever was installed for reading batches alone, what it lacks."""
    try:
        from raytriever.cli import main as run
    except ModuleNotFoundError as error:
        from raytriever import INSTALL

        sys.exit(f"raytriever: {error.name} is not installed. {INSTALL}")
    run()


if __name__ == "__main__":
    main()
