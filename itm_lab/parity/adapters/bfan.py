"""Reference cases of bfan."""

from itm_utils.models import bfan

NAMES = bfan.BFAN.PUBLIC_NAMES
load = bfan.BFAN.from_public
values = bfan.public_values
