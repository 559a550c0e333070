#!/bin/bash
#SBATCH --job-name=pick_ray --nodes=4 --ntasks-per-node=1 --cpus-per-task=16 --time=08:00:00
#SBATCH --requeue --signal=B:TERM@120 --output=outputs/pick_ray.log --open-mode=append
# sbatch docs/cluster/ray_slurm.sh, from a clone on a file system that all nodes share: a Ray cluster for this job, and
# train.py on its first node. A job that was preempted goes on when Slurm starts it again.
run=outputs/pick_ray
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/$run.token RAY_USAGE_STATS_ENABLED=0
mkdir -p outputs
(umask 077 && .venv/bin/python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
cpus="--num-cpus=$SLURM_CPUS_PER_TASK"
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    .venv/bin/ray start --head --node-ip-address="$head" --port=$port "$cpus" --block &
ray=$!
others=$((SLURM_JOB_NUM_NODES - 1))
if [ $others -gt 0 ]; then # they try until the head node is there
    srun --overlap --nodes=$others --ntasks=$others -x "$head" \
        bash -c "until .venv/bin/ray start --address=$head:$port $cpus --block; do sleep 5; done" &
    ray="$ray $!"
fi
until (exec 3<> "/dev/tcp/$head/$port") 2> /dev/null; do sleep 1; done
what="task=libero_pick policy=flow algorithm=ppo output=$run"
[ -d $run/checkpoint ] && what="resume=$run"
.venv/bin/python train.py $what placement=ray placement.address="$head:$port" placement.collectors=15 placement.cpus=4 &
train=$!
trap 'kill -TERM $train' TERM
wait $train
status=$?
[ $status -gt 128 ] && { wait $train; status=$?; } # it was waiting when the signal came, and the run saves now
kill $ray
exit $status
