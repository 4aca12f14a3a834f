"""`python -m sinkscope.cli`: the command line where its script is not on the path, and for `accelerate launch`."""

from sinkscope.cli.app import main

main()
