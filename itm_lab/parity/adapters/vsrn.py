"""Reference cases of vsrn."""

from itm_utils.models import vsrn

NAMES = vsrn.VSRN.PUBLIC_NAMES
load = vsrn.VSRN.from_public
values = vsrn.public_values
compare_case = vsrn.compare_case
