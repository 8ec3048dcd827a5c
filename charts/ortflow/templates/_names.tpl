{{- /* Names of documents, and amounts as Kubernetes writes them, as in manifests/kubernetes/names.py; a test compares them. */ -}}

{{- /* An amount of memory: `16 gib` as `16Gi`. */ -}}
{{- define "ortflow.quantity" -}}
{{- $written := index . 0 | trim | upper | replace " " "" | trimSuffix "B" | replace "I" "i" -}}
{{- hasSuffix "i" $written | ternary $written (replace "K" "k" $written) -}}
{{- end -}}

{{- /* A length of time, such as 1-02:03:04 or a number of minutes, in seconds. */ -}}
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

{{- /* Six letters that stand for a text. */ -}}
{{- define "ortflow.digest" -}}
{{- index . 0 | sha256sum | trunc 6 -}}
{{- end -}}

{{- /* A run's name as the beginning of an object's: those begin with a letter. */ -}}
{{- define "ortflow.label" -}}
{{- $name := index . 0 -}}
{{- regexMatch "^[0-9]" $name | ternary (printf "run-%s" $name) $name -}}
{{- end -}}

{{- /* NAME-SUFFIX, cut so that NAME-SUFFIX-worker-N is a host name. Arguments: name, nodes, suffix. */ -}}
{{- define "ortflow.job_name" -}}
{{- $suffix := index . 2 -}}
{{- $last := printf "-worker-%d" (max 0 (sub (index . 1) 1)) -}}
{{- $longest := max (len "-supervisor") (len $last) -}}
{{- $room := sub 62 (add $longest (len $suffix)) -}}
{{- printf "%s-%s" (include "ortflow.label" (list (index . 0)) | trunc (int $room) | trimAll "-") $suffix -}}
{{- end -}}

{{- /* NAME-WHAT for what outlives a release. Arguments: name, what. */ -}}
{{- define "ortflow.sibling" -}}
{{- $whole := include "ortflow.label" . -}}
{{- $room := sub 62 (len (index . 1)) -}}
{{- if gt (len $whole) (int $room) -}}
{{- $whole = printf "%s-%s" (trunc (int (sub $room 7)) $whole | trimAll "-") (include "ortflow.digest" .) -}}
{{- end -}}
{{- printf "%s-%s" $whole (index . 1) -}}
{{- end -}}

{{- /* A path seen from a folder. Arguments: folder, path. */ -}}
{{- define "ortflow.inside" -}}
{{- if hasPrefix "/" (index . 1) -}}{{- index . 1 -}}
{{- else -}}{{- printf "%s/%s" (regexReplaceAll "/+$" (index . 0) "") (index . 1) -}}
{{- end -}}
{{- end -}}

{{- /* A variable's value, so that the kubelet replaces no $(NAME) in it. */ -}}
{{- define "ortflow.literal" -}}
{{- index . 0 | replace "$" "$$" -}}
{{- end -}}
