"""The commands, one file for each, named as it is typed. Only this folder combines all the others."""
