{{- /* The twins of manifests/kubernetes/functions.py, values.py and overlay.py: a test compares them. */ -}}

{{- /* What the documents are made from: `run`, the values with their defaults, and what is no key of the run file. */ -}}
{{- define "ortflow.scope" -}}
{{- $run := omit .Values "global" "contents" | toJson | fromJson -}}
{{- include "ortflow.prune" $run -}}
{{- include "ortflow.fill" (list $run (include "ortflow.defaults" . | fromJson)) -}}
{{- $kubernetes := $run.backends.kubernetes -}}
{{- range $section := list "env" "secret_env" "labels" "annotations" "node_selector" "worker_node_selector" "launcher_node_selector" -}}
{{- range $key, $value := index $kubernetes $section -}}
{{- if has $key (list "true" "false") -}}
{{- fail (printf "backends.kubernetes.%s: Helm has read a name such as N, Y, no or on as %s: put the name in quotes" $section $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $contents := .Values.contents | default dict -}}
{{- range $place, $file := $kubernetes.files -}}
{{- if not (hasKey $contents (printf "file-%d" $place)) -}}
{{- fail (printf "backends.kubernetes.files[%d]: Helm does not read files beside the values; add --set-file contents.file-%d=%s" $place $place $file) -}}
{{- end -}}
{{- end -}}
{{- $text := toRawJson $run -}}
{{- $suffix := include "ortflow.digest" (list (printf "%s%s" $text (ternary (toRawJson $contents) "" (not (empty $contents))))) -}}
{{- dict
  "run" $run
  "text" $text
  "contents" $contents
  "job" (include "ortflow.job_name" (list $run.name $run.resources.nodes $suffix))
  "namespace" ($kubernetes.namespace | default .Release.Namespace)
  "version" .Chart.AppVersion
  | toJson -}}
{{- end -}}

{{- /* A document as data, with the run's overlays on it. */ -}}
{{- define "ortflow.document" -}}
{{- $document := index . 1 | fromYaml -}}
{{- if hasKey $document "Error" -}}{{- fail $document.Error -}}{{- end -}}
{{- range (index . 0).run.backends.kubernetes.overlay -}}
{{- if and (eq .kind $document.kind) (or (not .name) (hasSuffix (printf "-%s" .name) $document.metadata.name)) -}}
{{- include "ortflow.merge" (list $document .patch) -}}
{{- end -}}
{{- end -}}
{{- toYaml $document }}
{{- end -}}

{{- /* Take away every key without a value. */ -}}
{{- define "ortflow.prune" -}}
{{- $values := . -}}
{{- range $key, $value := . -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $values $key -}}
{{- else if kindIs "map" $value -}}{{- include "ortflow.prune" $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Set what is not there to its default. */ -}}
{{- define "ortflow.fill" -}}
{{- $values := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- if not (hasKey $values $key) -}}{{- $_ := set $values $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $key)) -}}
{{- include "ortflow.fill" (list (get $values $key) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A strategic merge patch. */ -}}
{{- define "ortflow.merge" -}}
{{- $base := index . 0 -}}
{{- range $key, $patch := index . 1 -}}
{{- if eq $key "$patch" -}}
{{- else if kindIs "invalid" $patch -}}{{- $_ := unset $base $key -}}
{{- else if kindIs "map" $patch -}}
{{- $directive := get $patch "$patch" -}}
{{- if eq $directive "delete" -}}{{- $_ := unset $base $key -}}
{{- else -}}
{{- if or (eq $directive "replace") (not (kindIs "map" (get $base $key))) -}}{{- $_ := set $base $key dict -}}{{- end -}}
{{- include "ortflow.merge" (list (get $base $key) $patch) -}}
{{- end -}}
{{- else if and (kindIs "slice" $patch) (include "ortflow.merge_key" (list $key $patch)) -}}
{{- include "ortflow.merge_list" (list $base $key $patch (include "ortflow.merge_key" (list $key $patch))) -}}
{{- else -}}{{- $_ := set $base $key $patch -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ortflow.merge_list" -}}
{{- $base := index . 0 -}}{{- $key := index . 1 -}}{{- $patch := index . 2 -}}{{- $name := index . 3 -}}
{{- $old := get $base $key | default list -}}
{{- range $patch -}}{{- if eq (get . "$patch") "replace" -}}{{- $old = list -}}{{- end -}}{{- end -}}
{{- $new := list -}}{{- $known := list -}}
{{- range $item := $old -}}
{{- $known = append $known (get $item $name | toJson) -}}
{{- $gone := false -}}
{{- range $patch -}}
{{- if eq (get . $name | toJson) (get $item $name | toJson) -}}
{{- if eq (get . "$patch") "delete" -}}{{- $gone = true -}}{{- else -}}{{- include "ortflow.merge" (list $item .) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $gone -}}{{- $new = append $new $item -}}{{- end -}}
{{- end -}}
{{- range $patch -}}
{{- if and (not (hasKey . "$patch")) (not (has (get . $name | toJson) $known)) -}}
{{- $item := dict -}}{{- include "ortflow.merge" (list $item .) -}}{{- $new = append $new $item -}}
{{- end -}}
{{- end -}}
{{- $_ := set $base $key $new -}}
{{- end -}}

{{- /* What the items of a list are known by; nothing where they are not. */ -}}
{{- define "ortflow.merge_key" -}}
{{- $names := dict "containers" "name" "initContainers" "name" "env" "name" "volumes" "name" "imagePullSecrets" "name" "volumeMounts" "mountPath" "volumeDevices" "devicePath" "ports" "containerPort" "hostAliases" "ip" "topologySpreadConstraints" "topologyKey" -}}
{{- $name := get $names (index . 0) -}}
{{- $found := "" -}}
{{- if $name -}}
{{- range index . 1 -}}
{{- if hasKey . $name -}}{{- $found = $name -}}
{{- else if and (eq $name "containerPort") (hasKey . "port") -}}{{- $found = "port" -}}
{{- else if and (hasKey . "$patch") (not $found) -}}{{- $found = $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{- define "ortflow.quantity" -}}
{{- $written := index . 0 | trim | upper | replace " " "" | trimSuffix "B" | replace "I" "i" -}}
{{- hasSuffix "i" $written | ternary $written (replace "K" "k" $written) -}}
{{- end -}}

{{- define "ortflow.seconds" -}}
{{- $limit := index . 0 -}}
{{- if not (kindIs "string" $limit) -}}{{- $limit = int64 $limit | toString -}}{{- end -}}
{{- $parts := regexFindAll "[0-9]+" $limit -1 -}}
{{- if eq (len $parts) 1 -}}{{- mul 60 (atoi (index $parts 0)) -}}
{{- else -}}
{{- $total := 0 -}}
{{- if eq (len $parts) 4 -}}{{- $total = atoi (first $parts) | mul 24 -}}{{- $parts = rest $parts -}}{{- end -}}
{{- $total = add $total (atoi (index $parts 0)) -}}
{{- add (mul (add (mul $total 60) (atoi (index $parts 1))) 60) (atoi (index $parts 2)) -}}
{{- end -}}
{{- end -}}

{{- define "ortflow.digest" -}}
{{- index . 0 | sha256sum | trunc 6 -}}
{{- end -}}

{{- define "ortflow.label" -}}
{{- $name := index . 0 -}}
{{- regexMatch "^[0-9]" $name | ternary (printf "run-%s" $name) $name -}}
{{- end -}}

{{- define "ortflow.job_name" -}}
{{- $suffix := index . 2 -}}
{{- $last := printf "-worker-%d" (max 0 (sub (index . 1) 1)) -}}
{{- $longest := max (len "-supervisor") (len $last) -}}
{{- $room := sub 62 (add $longest (len $suffix)) -}}
{{- printf "%s-%s" (include "ortflow.label" (list (index . 0)) | trunc (int $room) | trimAll "-") $suffix -}}
{{- end -}}

{{- define "ortflow.sibling" -}}
{{- $whole := include "ortflow.label" . -}}
{{- $room := sub 62 (len (index . 1)) -}}
{{- if gt (len $whole) (int $room) -}}
{{- $whole = printf "%s-%s" (trunc (int (sub $room 7)) $whole | trimAll "-") (include "ortflow.digest" .) -}}
{{- end -}}
{{- printf "%s-%s" $whole (index . 1) -}}
{{- end -}}

{{- define "ortflow.inside" -}}
{{- if hasPrefix "/" (index . 1) -}}{{- index . 1 -}}
{{- else -}}{{- printf "%s/%s" (regexReplaceAll "/+$" (index . 0) "") (index . 1) -}}
{{- end -}}
{{- end -}}

{{- define "ortflow.literal" -}}
{{- index . 0 | replace "$" "$$" -}}
{{- end -}}

{{- define "ortflow.before" -}}
{{- splitList (index . 1) (index . 0) | first -}}
{{- end -}}

{{- define "ortflow.after" -}}
{{- rest (splitList (index . 1) (index . 0)) | join (index . 1) -}}
{{- end -}}
