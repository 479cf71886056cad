"""Environment variables: the only module that may read them, and the list of those that are read.

There are none: behaviour is chosen by flags, which are typed, validated and printed by --help. torch, OpenMP and rich read their
own (OMP_NUM_THREADS, NO_COLOR). A variable that has to be read one day gets a row here, with what it does and why it is no flag.
"""

VARIABLES: dict[str, str] = {}
