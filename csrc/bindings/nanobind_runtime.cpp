// nanobind ships its runtime as sources; this compiles the copy that the build environment has.
// (The include path is nanobind's own `src` folder, see setup.py.)
#include "nb_combined.cpp"
