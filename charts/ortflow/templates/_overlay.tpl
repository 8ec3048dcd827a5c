{{- /* backends.kubernetes.overlay: strategic merge patches, as in manifests/kubernetes/overlay.py. */ -}}

{{- /* A document with the overlays that are meant for it. Arguments: the chart's root, the template of the document. */ -}}
{{- define "ortflow.document" -}}
{{- $scope := include "ortflow.scope" (index . 0) | fromJson -}}
{{- $document := include (index . 1) $scope | fromYaml -}}
{{- if hasKey $document "Error" -}}{{- fail $document.Error -}}{{- end -}}
{{- range $scope.k8s.overlay -}}
{{- if and (eq .kind $document.kind) (or (not .name) (hasSuffix (printf "-%s" .name) $document.metadata.name)) -}}
{{- include "ortflow.merge" (list $document .patch) -}}
{{- end -}}
{{- end -}}
{{- toYaml $document }}
{{- end -}}

{{- /* Merge a patch into a section, in place. Arguments: section, patch. */ -}}
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

{{- /* The same for a list whose items have a key. Arguments: section, key of the list, patch, key of the items. */ -}}
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

{{- /* The key by which the items of a list are known, if they are. Arguments: key of the list, list. */ -}}
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
