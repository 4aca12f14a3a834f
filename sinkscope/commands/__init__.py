"""The commands, one file for each, named as it is typed. Only this folder combines all the others.

Importing it loads the plugins, so that every command, here or in another process, finds complete registers.
"""

from sinkscope.plugins import load_plugins

load_plugins()
