"""Imported first by the process that workers are forked from: libraries that it imports next would warn there."""

import logging
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
