"""Silence libraries. The process from which workers are forked imports this module before them."""

import logging
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
