"""One file per command, named as it is typed: the only place that joins the rooms."""
