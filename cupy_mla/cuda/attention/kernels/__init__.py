"""The kernels of attention, one module each under its name.

A module answers, for a `Problem`:

    serves(problem)                       whether the kernel can serve it
    candidates(problem)                   divisions that may be the fastest; of each kind that it has, where one is asked for
    work(problem, division)               what takes time, by name: amounts, and what `times` calls this kind of work
    launches(problem, division, call)     the program
    kernels()                             all variants, for the compile tests and for warming up
"""
