"""`python -m sinkscope` is the command `sinkscope`, where the folder of scripts is not on the path."""

from sinkscope.cli.app import main

if __name__ == "__main__":
    main()
