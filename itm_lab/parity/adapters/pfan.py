"""Reference cases of pfan."""

from itm_utils.models import pfan

NAMES = pfan.PFAN.PUBLIC_NAMES
load = pfan.PFAN.from_public
values = pfan.public_values
compare_case = pfan.compare_case
