# Generated from notebooks/ by `itm export`: edit the notebooks, not this file.

"""The models of the book, one module a chapter.

* ``keeping_score`` from ``notebooks/00_keeping_score.ipynb``
* ``vsepp`` from ``notebooks/01_vsepp.ipynb``
* ``scan`` from ``notebooks/02_scan.ipynb``
* ``bfan`` from ``notebooks/03_bfan.ipynb``
* ``pfan`` from ``notebooks/04_pfan.ipynb``
* ``vsrn`` from ``notebooks/05_vsrn.ipynb``
* ``saem`` from ``notebooks/06_saem.ipynb``
* ``sgraf`` from ``notebooks/07_sgraf.ipynb``
* ``mmca`` from ``notebooks/08_mmca.ipynb``
* ``dcpa`` from ``notebooks/09_dcpa.ipynb``
* ``aoq`` from ``notebooks/10_aoq.ipynb``
* ``ccr_ccs`` from ``notebooks/11_ccr_ccs.ipynb``
* ``leaderboard`` from ``notebooks/13_leaderboard.ipynb``
* ``search_at_scale`` from ``notebooks/14_search_at_scale.ipynb``
"""
