"""``python -m raytriever``: the command."""

from raytriever.cli import main

if __name__ == "__main__":
    main()
