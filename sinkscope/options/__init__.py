"""Options as pydantic models: a command line, a recipe and a run.json are three spellings of the same model.

Those that commands share are here, and those of one command in its folder. Nothing here imports torch, so that
`--help` answers at once.
"""
