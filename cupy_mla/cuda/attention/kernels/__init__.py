"""The kernels of attention, one module each under its name.

A module answers, for a `Problem`:

    serves(problem)                      whether the kernel can serve it, however many queries and entries it has
    candidates(problem)                  divisions that may be the fastest; where something is forced, one of each kind
    fits(problem, division)              whether the kernel is built for a division of such a kind
    work(problem, division)              what `times` calls this kind of work, what takes time in it, and how much
    launches(problem, division, call)    the program
    kernels()                            all variants, for the compile tests and for warming up

Some of them have `same_bits(division)`: the divisions that give the same bits. `dense.py` says what a module of dense
attention answers, for a `DenseProblem`.
"""
