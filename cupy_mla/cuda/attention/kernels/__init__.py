"""The kernels of attention, one module each under its name.

A module answers, for a `Problem`:

    serves(problem)                      whether the kernel can serve it, for any number of queries and entries; of the
                                         portable kernels also whether no other one does, unless they are forced
    candidates(problem)                  divisions that may be the fastest; where a kernel or division is forced, at
                                         least one of each kind that the kernel has
    fits(problem, division)              whether the kernel is built for a division of such a kind
    work(problem, division)              the kind of work as `times` knows it, what takes time in it, and how much of
                                         each there is
    launches(problem, division, call)    the program
    kernels()                            all variants, for the compile tests and for warming up

`fp8_sm90` also has `same_bits(division)`: the divisions that give the same bits. The modules of dense attention answer
the same for a `DenseProblem`. Only `launches(problem, division, params, plan)` differs: it takes `struct DenseParams`,
and the call's plan or None.
"""
