"""Output of Slurm 22.05 about a cluster, shortened, for tests of `ortflow doctor`."""

CONFIG = """\
Configuration data as of 2026-11-21T14:21:52
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = socket=/run/munge/socket,cred_expire=5
BatchStartTimeout       = 10 sec
DefMemPerCPU            = 200
JobRequeue              = 1
KillWait                = 5 sec
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
Prolog                  = (null)
PrologFlags             = Alloc,Contain
SlurmctldParameters     = (null)
SlurmctldHost[0]        = vm(127.0.0.1)

MPI Plugins Configuration:
PMIxTimeout             = 300

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=lab,x AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=30 Hidden=NO MaxNodes=3 MaxTime=1-01:00:00 \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node[1-4] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO \
PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) \
DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=16000M,node=4,billing=16
PartitionName=urgent AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE GraceTime=0 MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=node[1-4] PreemptMode=OFF State=DRAIN \
TotalCPUs=16 TotalNodes=4 DefMemPerCPU=900 MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=16000M,node=4,billing=16
"""
NODE = """\
NodeName=node1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=6 CPULoad=5.43 AvailableFeatures=(null) \
ActiveFeatures=(null) Gres={gres} NodeAddr=127.0.0.1 NodeHostName=node1 Port=21001 Version=22.05.8 \
OS=Linux 6.18.44-fc-v595 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=21384 Sockets=4 Boards=1 \
State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,urgent  \
BootTime=2026-11-21T09:54:53 CfgTRES=cpu=4,mem=4000M,billing=4 AllocTRES= CapWatts=n/a Reason=x [root@2026-11-21]
"""
PLUGINS = """\
MPI plugin types are...
	pmix
	none
	cray_shasta
	pmi2
specific pmix plugin versions available: pmix_v4,pmix_v5
"""
