"""The published systems and the settings of their figures, as far as we know them."""

HET = "HET, VLDB 2022"
HERALD = "Herald, NSDI 2024"
ESD = "ESD, arXiv 2512.21615"
FAE = "FAE, VLDB 2022"
SCARS = "SCARS, arXiv 2411.01611"

HET_SETTING = "8 workers, 1 server, caches of 10 %, dim 128, batch 128 a worker, SGD"
HERALD_SETTING = (
    "8 workers, 1 server, caches of 10 %, dim 512, batch 128 a worker (simulated) or 256 "
    "(testbed), 100 GbE"
)
ESD_SETTING = "unequal links; its abstract gives no more"
FAE_SETTING = "hot rows in 256 MB, beside XDL at equal accuracy; more: see the paper"
SCARS_SETTING = "limits of memory, compute and links; its abstract gives no more"
SEE = "see the paper"  # figures that the paper has and we do not know
