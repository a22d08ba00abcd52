"""Real MPI ranks for plain pytest: workers that mpiexec starts once, and a world that gives them programs."""
