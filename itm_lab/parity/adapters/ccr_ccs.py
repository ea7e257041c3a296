"""Reference cases of ccr_ccs."""

from itm_utils.models import ccr_ccs

compare_case = ccr_ccs.compare_case
