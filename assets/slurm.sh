#!/bin/bash
# sbatch assets/slurm.sh: a run on two nodes of eight GPUs. JAX finds the other processes by SLURM's
# variables and gives each of them one GPU, so there is a task for each GPU. A minute before the time
# is up every process gets SIGTERM, saves and exits; the next job of the array goes on from there.
#SBATCH --job-name=plain-t5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --array=1-10%1
#SBATCH --signal=TERM@60
#SBATCH --output=slurm-%A.log
#SBATCH --open-mode=append
srun python train.py --config xl_c4 --mesh.fsdp true --run_dir "${RUN_DIR:-runs/xl_c4}"
