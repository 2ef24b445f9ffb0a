from benchmarks.products import main

main()
