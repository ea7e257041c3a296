"""Reference cases of mmca."""

from itm_utils.models import mmca

NAMES = mmca.MMCA.PUBLIC_NAMES
load = mmca.MMCA.from_public
values = mmca.public_values
compare_case = mmca.compare_case
