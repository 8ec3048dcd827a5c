"""What ranks and launchers need of the operating system: files, disks, clocks, cores. Knows no run."""
