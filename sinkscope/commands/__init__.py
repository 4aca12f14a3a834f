"""One file a command, named as it is typed: the only place that joins the rooms."""
