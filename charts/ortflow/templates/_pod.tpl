{{- /* The pod template of the launcher or of the workers. Arguments: `scope`, `component`. */ -}}
{{- define "ortflow.pod" -}}
{{- $run := .scope.run -}}
{{- $k8s := .scope.k8s -}}
{{- $launcher := eq .component "launcher" -}}
{{- $ranks := or (not $launcher) $k8s.launcher_as_worker -}}
metadata:
  {{- include "ortflow.pod_metadata" (dict "scope" .scope "component" .component) | nindent 2 }}
spec:
  serviceAccountName: {{ $k8s.service_account | default .scope.job | quote }}
  {{- if not $k8s.service_account }}
  automountServiceAccountToken: false
  {{- end }}
  {{- $nodes := dict }}
  {{- if and $ranks .scope.gpus $run.resources.gpu_type }}
  {{- $nodes = dict $k8s.gpu.type_label $run.resources.gpu_type }}
  {{- end }}
  {{- include "ortflow.placement" (dict "scope" .scope "component" .component "nodes" $nodes) | nindent 2 }}
  terminationGracePeriodSeconds: {{ int64 $k8s.grace_seconds }}
  {{- with $k8s.priority_class }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $k8s.gang }}
  schedulerName: {{ .scheduler_name | default (eq .scheduler "volcano" | ternary "volcano" "scheduler-plugins-scheduler") | quote }}
  {{- end }}
  {{- with $k8s.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  restartPolicy: {{ $launcher | ternary "Never" "OnFailure" }}
  {{- if and .scope.gpus $k8s.gpu.runtime_class }}
  runtimeClassName: {{ $k8s.gpu.runtime_class | quote }}
  {{- end }}
  {{- $spread := and (not $launcher) (ne $k8s.spread "none") }}
  {{- if or $spread $k8s.topology_spread }}
  topologySpreadConstraints:
  {{- if $spread }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ eq $k8s.spread "require" | ternary "DoNotSchedule" "ScheduleAnyway" }}
    labelSelector:
      matchLabels:
        ortflow.dev/job: {{ .scope.job }}
        ortflow.dev/component: worker
  {{- end }}
  {{- with $k8s.topology_spread }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
  containers:
  - name: {{ .component }}
    image: {{ $k8s.image | quote }}
    {{- with $k8s.image_pull_policy }}
    imagePullPolicy: {{ . }}
    {{- end }}
    command: [{{ $k8s.python | toJson }}, -m, ortflow.launchers.kubernetes.{{ $launcher | ternary "run_supervisor" "worker" }}]
    workingDir: /
    env:
    - {name: ORTFLOW_RUN_FILE, value: /etc/ortflow/run/run.yaml}
    - {name: ORTFLOW_LAUNCHER, value: kubernetes}
    - {name: ORTFLOW_JOB, value: {{ .scope.job }}}
    - {name: ORTFLOW_MOUNT, value: {{ $k8s.volume.mount | toJson }}}
    - {name: ORTFLOW_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
    # On the node's network a pod's host name is the node's, which no DNS may know.
    - {name: ORTFLOW_POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: ORTFLOW_POD_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: ORTFLOW_ADDRESS, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: ORTFLOW_SSH_PORT, value: "{{ $k8s.ssh_port }}"}
    - {name: ORTFLOW_SSH_FOLDER, value: {{ include "ortflow.ssh_folder" $k8s }}}
    # Of the launcher's Job: another MPIJob of the same name is another submission.
    - name: ORTFLOW_SUBMISSION
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    - {name: PYTHONUNBUFFERED, value: "1"}
    - {name: XDG_CACHE_HOME, value: {{ printf "%s/cache" $k8s.volume.mount | toJson }}}
    # On a full disk CPython up to 3.12.7 leaves half of a compiled module, which cannot be imported from then on.
    - {name: PYTHONDONTWRITEBYTECODE, value: "1"}
    - {name: CUDA_CACHE_PATH, value: {{ printf "%s/cache/cuda" $k8s.volume.mount | toJson }}}
    {{- range $name, $value := $k8s.env }}
    - {name: {{ $name | quote }}, value: {{ include "ortflow.literal" (list $value) | toJson }}}
    {{- end }}
    {{- range $name, $secret := $k8s.secret_env }}
    - name: {{ $name | quote }}
      valueFrom: {secretKeyRef: {name: {{ splitList "/" $secret | first | quote }}, key: {{ splitList "/" $secret | last | quote }}}}
    {{- end }}
    {{- if not $ranks }}
    - {name: ORTFLOW_NO_RANKS, value: "1"}
    {{- end }}
    {{- $resources := include "ortflow.resources" .scope }}
    {{- if not $ranks }}
    resources:
      requests:
        cpu: {{ $k8s.launcher_resources.cpu | quote }}
        memory: {{ include "ortflow.quantity" (list $k8s.launcher_resources.memory) }}
      limits: {{ include "ortflow.limits" (list $k8s (include "ortflow.quantity" (list $k8s.launcher_resources.memory))) }}
    {{- else if $resources }}
    # Requests equal to limits: such a pod is the last to be evicted.
    resources:
      requests:
        {{- $resources | nindent 8 }}
      limits:
        {{- $resources | nindent 8 }}
    {{- end }}
    {{- include "ortflow.container_security" $k8s | nindent 4 }}
    {{- if not $launcher }}
    # A bare connection costs the ssh daemon a process: once it has answered it is asked more rarely.
    startupProbe: {tcpSocket: {port: {{ $k8s.ssh_port }}}, periodSeconds: 1, failureThreshold: 300}
    readinessProbe: {tcpSocket: {port: {{ $k8s.ssh_port }}}, periodSeconds: 10}
    {{- end }}
    volumeMounts:
    - {name: run, mountPath: /etc/ortflow/run, readOnly: true}
    {{- include "ortflow.data_mount" $k8s.volume | nindent 4 }}
    - {name: shm, mountPath: /dev/shm}
    {{- range $k8s.volumes }}
    - name: {{ .name | quote }}
      mountPath: {{ .mount | toJson }}
      {{- if .read_only }}
      readOnly: true
      {{- end }}
      {{- with .sub_path }}
      subPath: {{ . | toJson }}
      {{- end }}
    {{- end }}
  volumes:
  {{- include "ortflow.run_volume" .scope | nindent 2 }}
  {{- include "ortflow.data_volume" .scope | nindent 2 }}
  - name: shm
    emptyDir:
      medium: Memory
      {{- with $k8s.shared_memory }}
      sizeLimit: {{ include "ortflow.quantity" (list .) }}
      {{- end }}
  {{- range $k8s.volumes }}
  {{- toYaml (list (merge (dict "name" .name) .source)) | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Where the operator mounts the ssh keys. */ -}}
{{- define "ortflow.ssh_folder" -}}
{{- .ssh_folder | default (.security.run_as_user | empty | ternary "/root/.ssh" "/home/ortflow/.ssh") | toJson -}}
{{- end -}}

{{- /* Limits of a container without ranks. Arguments: backends.kubernetes, memory. */ -}}
{{- define "ortflow.limits" -}}
{{- $limits := dict "memory" (index . 1) -}}
{{- with (index . 0).launcher_resources.cpu_limit -}}{{- $_ := set $limits "cpu" . -}}{{- end -}}
{{- toJson $limits -}}
{{- end -}}

{{- /* Amounts of a pod with ranks. */ -}}
{{- define "ortflow.resources" -}}
{{- $amounts := dict -}}
{{- if .k8s.worker_cpu -}}{{- $_ := set $amounts "cpu" .k8s.worker_cpu -}}
{{- else if .run.resources.cpus_per_rank -}}{{- $_ := set $amounts "cpu" (mul .run.resources.cpus_per_rank .run.resources.ranks_per_node) -}}
{{- end -}}
{{- with .run.resources.memory -}}{{- $_ := set $amounts "memory" (include "ortflow.quantity" (list .)) -}}{{- end -}}
{{- with .k8s.ephemeral_storage -}}{{- $_ := set $amounts "ephemeral-storage" (include "ortflow.quantity" (list .)) -}}{{- end -}}
{{- with .gpus -}}{{- $_ := set $amounts $.k8s.gpu.resource . -}}{{- end -}}
{{- with merge $amounts .k8s.extended_resources -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{- /*
Who the processes of a pod are, who fetches its image, and on which nodes it may be. Arguments: `scope`, `component`;
`nodes`, labels of nodes beside those of the run file.
*/ -}}
{{- define "ortflow.placement" -}}
{{- $k8s := .scope.k8s -}}
{{- with $k8s.image_pull_secrets -}}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{ end -}}
securityContext:
  runAsUser: {{ int64 $k8s.security.run_as_user }}
  runAsGroup: {{ int64 $k8s.security.run_as_group }}
  {{- if $k8s.security.run_as_user }}
  runAsNonRoot: true
  {{- end }}
  fsGroup: {{ int64 $k8s.security.fs_group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: {{ $k8s.security.seccomp }}
{{- with merge dict $k8s.node_selector (index $k8s (printf "%s_node_selector" .component)) (.nodes | default dict) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat $k8s.tolerations (index $k8s (printf "%s_tolerations" .component)) }}
tolerations:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- /* What the processes of a container may do. Root's ssh daemon cannot serve without the usual capabilities. */ -}}
{{- define "ortflow.container_security" -}}
{{- if or .security.run_as_user .security.capabilities -}}
securityContext:
  {{- if .security.run_as_user }}
  allowPrivilegeEscalation: false
  {{- end }}
  capabilities:
    {{- if .security.run_as_user }}
    drop: [ALL]
    {{- end }}
    {{- with .security.capabilities }}
    add: {{ toJson . }}
    {{- end }}
{{- end -}}
{{- end -}}

{{- /* The mount of the run's volume. */ -}}
{{- define "ortflow.data_mount" -}}
- name: data
  mountPath: {{ .mount | toJson }}
  {{- with .sub_path }}
  subPath: {{ . | toJson }}
  {{- end }}
{{- end -}}

{{- /* The run file, and the files beside it. */ -}}
{{- define "ortflow.run_volume" -}}
- name: run
  configMap:
    name: {{ .job }}-run
    items:
    - {key: run.yaml, path: run.yaml}
    {{- range $place, $file := .k8s.files }}
    - {key: file-{{ $place }}, path: {{ printf "files/%s" $file | toJson }}}
    {{- end }}
{{- end -}}

{{- /* The run's volume: one of the kinds of backends.kubernetes.volume. */ -}}
{{- define "ortflow.data_volume" -}}
{{- $volume := .k8s.volume -}}
- name: data
  {{- if or $volume.claim $volume.create }}
  persistentVolumeClaim:
    claimName: {{ $volume.claim | default (include "ortflow.sibling" (list .run.name "data")) | quote }}
  {{- else if $volume.host_path }}
  hostPath:
    path: {{ $volume.host_path | toJson }}
    type: Directory
  {{- else if $volume.nfs }}
  nfs:
    server: {{ $volume.nfs.server | quote }}
    path: {{ $volume.nfs.path | toJson }}
  {{- else if $volume.s3 }}
  csi:
    driver: {{ $volume.s3.driver | quote }}
    {{- with $volume.s3.attributes }}
    volumeAttributes:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $volume.s3.secret }}
    nodePublishSecretRef:
      name: {{ . | quote }}
    {{- end }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}
