"""`python -m sinkscope`: the command line where its script is not on the path."""

from sinkscope.cli.app import main

main()
