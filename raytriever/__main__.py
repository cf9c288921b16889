"""``python -m raytriever``: the command."""

import sys


def main() -> None:
    """Runs the command. If Raytriever was installed only for reading batches, it names what is missing."""
    try:
        from raytriever.cli import main as run
    except ModuleNotFoundError as error:
        from raytriever import INSTALL

        sys.exit(f"raytriever: {error.name} is not installed. {INSTALL}")
    run()


if __name__ == "__main__":
    main()
