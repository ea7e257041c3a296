"""Reference cases of saem."""

from itm_utils.models import saem

NAMES = saem.SAEM.PUBLIC_NAMES
load = saem.SAEM.from_public
values = saem.public_values
compare_case = saem.compare_case
