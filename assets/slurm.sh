#!/bin/bash
# Train on two nodes with eight GPUs each. Submit this job with `sbatch assets/slurm.sh`.
# SLURM starts one process for each GPU. JAX reads SLURM's environment variables, so the
# processes find each other, and each process uses its own GPU.
# One minute before the time limit, SLURM sends SIGTERM to all processes. The processes
# then save a checkpoint and exit. The next job of the array resumes the run from this
# checkpoint.
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
