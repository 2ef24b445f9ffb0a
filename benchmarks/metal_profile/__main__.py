from benchmarks.metal_profile import main

main()
