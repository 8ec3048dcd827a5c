{{- /*
What documents are made from: `run`, the run file; `k8s`, its section backends.kubernetes; `job`, the MPIJob's name;
`gpus` of a pod with ranks; `namespace`, `version`, `contents`.
*/ -}}
{{- define "ortflow.scope" -}}
{{- $run := omit .Values "global" "contents" | toJson | fromJson -}}
{{- include "ortflow.prune" $run -}}
{{- $k8s := $run.backends.kubernetes -}}
{{- range $section := list "env" "secret_env" "labels" "annotations" "node_selector" "worker_node_selector" "launcher_node_selector" -}}
{{- range $key, $value := index $k8s $section -}}
{{- if has $key (list "true" "false") -}}
{{- fail (printf "backends.kubernetes.%s: Helm has read a name such as N, Y, no or on as %s: put the name in quotes" $section $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $contents := .Values.contents | default dict -}}
{{- range $place, $file := $k8s.files -}}
{{- if not (hasKey $contents (printf "file-%d" $place)) -}}
{{- fail (printf "backends.kubernetes.files[%d]: Helm does not read files beside the values; add --set-file contents.file-%d=%s" $place $place $file) -}}
{{- end -}}
{{- end -}}
{{- $suffix := include "ortflow.digest" (list (printf "%s%s" (toRawJson $run) (empty $contents | ternary "" (toRawJson $contents)))) -}}
{{- dict
  "run" $run
  "k8s" $k8s
  "job" (include "ortflow.job_name" (list $run.name (add $run.resources.nodes ($run.resources.spares | default 0)) $suffix))
  "gpus" (mul $run.resources.gpus_per_rank $run.resources.ranks_per_node)
  "namespace" ($k8s.namespace | default .Release.Namespace)
  "version" .Chart.AppVersion
  "contents" $contents
  | toJson -}}
{{- end -}}

{{- /* Remove every key without a value. */ -}}
{{- define "ortflow.prune" -}}
{{- $values := . -}}
{{- range $key, $value := . -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $values $key -}}
{{- else if kindIs "map" $value -}}{{- include "ortflow.prune" $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /*
The metadata of a document. Arguments: `scope`, `name`; `lasting` if it outlives the job; `labels` and `annotations`
beside those that every document has.
*/ -}}
{{- define "ortflow.metadata" -}}
name: {{ .name }}
{{- with .scope.k8s.namespace }}
namespace: {{ . | quote }}
{{- end }}
labels:
  {{- include "ortflow.labels" . | nindent 2 }}
annotations:
  ortflow.dev/version: {{ .scope.version | quote }}
  {{- with .annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Labels. Arguments: as of "ortflow.metadata", and the `component` of a pod. */ -}}
{{- define "ortflow.labels" -}}
app.kubernetes.io/name: ortflow
app.kubernetes.io/managed-by: ortflow
ortflow.dev/run: {{ .scope.run.name | quote }}
{{- if not .lasting }}
ortflow.dev/job: {{ .scope.job }}
{{- end }}
{{- with .component }}
ortflow.dev/component: {{ . }}
{{- end }}
{{- with .labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The metadata of a component's pods. Arguments: `scope`, `component`, `lasting`. */ -}}
{{- define "ortflow.pod_metadata" -}}
labels:
  {{- include "ortflow.labels" (merge (dict "labels" .scope.k8s.labels) .) | nindent 2 }}
{{- with .scope.k8s.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Selects launcher and workers. */ -}}
{{- define "ortflow.ranks" -}}
matchLabels:
  ortflow.dev/job: {{ .job }}
matchExpressions:
- {key: ortflow.dev/component, operator: In, values: [launcher, worker]}
{{- end -}}

{{- /* Whether the number of nodes may change from attempt to attempt: "true" or nothing. Argument: the run. */ -}}
{{- define "ortflow.elastic" -}}
{{- if lt (int64 (.resources.min_nodes | default .resources.nodes)) (int64 .resources.nodes) -}}true{{- end -}}
{{- end -}}

{{- /* Whether each attempt takes some of the nodes that are there: "true" or nothing. Argument: the run. */ -}}
{{- define "ortflow.chooses_nodes" -}}
{{- if or (include "ortflow.elastic" .) (gt (int64 (.resources.spares | default 0)) 0) -}}true{{- end -}}
{{- end -}}

{{- /* The smallest number of nodes that the run can have, as workflow/spec/checks/nodes.py finds it. Argument: the run. */ -}}
{{- define "ortflow.least_nodes" -}}
{{- $nodes := int64 .resources.nodes -}}
{{- $least := $nodes -}}
{{- if include "ortflow.elastic" . -}}
{{- $ranks := int64 .resources.ranks_per_node -}}
{{- $parallel := .parallel | default dict -}}
{{- $each := mul ($parallel.pipeline | default 1) ($parallel.horizontal | default 1) -}}
{{- $micro := int64 .data.micro_batch -}}
{{- $own := mul $micro (.train.gradient_accumulation | default 1) (max 1 (div (mul $nodes $ranks) $each)) -}}
{{- $batch := int64 (.train.global_batch | default $own) -}}
{{- range $some := untilStep (int .resources.min_nodes) (int $nodes) 1 -}}
{{- $world := mul $some $ranks -}}
{{- if and (lt (int64 $some) $least) (not (mod $world $each)) (not (mod $batch (mul $micro (max 1 (div $world $each))))) -}}
{{- $least = int64 $some -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $least -}}
{{- end -}}
