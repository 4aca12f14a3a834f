"""The claims of each paper: a file for a paper, or for several on one topic."""
