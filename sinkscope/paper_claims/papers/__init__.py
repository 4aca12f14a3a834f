"""The claims of each paper, one file a paper."""
