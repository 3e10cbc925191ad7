{{/* What follows from a model's values: the names, addresses, sizes and files of its engines. */}}

{{/*
The models, each with all values that it leaves to the defaults, as a JSON object of one list. Checks what a schema
cannot.
*/}}
{{- define "octavo.models" -}}
{{- $models := list -}}
{{- $seen := dict -}}
{{- range .Values.engine.models -}}
{{- $model := mergeOverwrite (deepCopy $.Values.engine.defaults) (deepCopy .) -}}
{{- if hasKey $seen $model.id -}}
{{- fail (printf "engine.models: two have the id %s; each needs its own" $model.id) -}}
{{- end -}}
{{- $_ := set $seen $model.id true -}}
{{- if and $model.autoscaling.enabled (gt (int $model.autoscaling.minReplicas) (int $model.autoscaling.maxReplicas)) -}}
{{- fail (printf "engine.models, %s: autoscaling.minReplicas is more than maxReplicas" $model.id) -}}
{{- end -}}
{{- $_ := set $model "numExecutors" (mul (int $model.executors) (add 1 (int $model.spareExecutors))) -}}
{{- $_ := set $model "fullname" (printf "%s-engine-%s" (include "octavo.fullname" $) $model.id) -}}
{{- $_ := set $model "usesHub" (and (hasKey $model.source "reference") (ne ($model.source.reference | default "") "demo")) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* What the executors are told to load. */}}
{{- define "octavo.modelReference" -}}
{{- if .source.reference -}}
{{- .source.reference -}}
{{- else -}}
{{- $path := (.source.claim | default .source.image).path | default "." -}}
{{- printf "/models/%s%s" .id (ternary "" (printf "/%s" $path) (eq $path ".")) -}}
{{- end -}}
{{- end -}}

{{- define "octavo.modelVolume" -}}
{{- if .source.claim }}
- name: model-{{ .id }}
  persistentVolumeClaim:
    claimName: {{ .source.claim.name }}
    readOnly: true
{{- else if .source.image }}
- name: model-{{ .id }}
  image:
    reference: {{ .source.image.reference }}
    pullPolicy: {{ .source.image.pullPolicy | default "IfNotPresent" }}
{{- end }}
{{- end -}}

{{- define "octavo.modelMount" -}}
{{- if not .source.reference }}
- name: model-{{ .id }}
  mountPath: /models/{{ .id }}
  readOnly: true
{{- end }}
{{- end -}}

{{/*
MiB of /dev/shm. On the CPU the KV blocks lie there, with a ledger of 640 bytes for each: a part in 32 is more than that
takes for blocks of 20 kB and up. On a GPU they do not.
*/}}
{{- define "octavo.shmMib" -}}
{{- ternary (add .kvMemoryMib (max 64 (div (int .kvMemoryMib) 32))) 64 (eq .device "cpu") -}}
{{- end -}}

{{- define "octavo.engineConfig" -}}
{{- $threads := max 1 (div (int .model.cpus) (int .model.executors)) -}}
{{- $tls := include "octavo.internalTlsOptions" .root | fromJson -}}
{{- $executor := dict
    "listen" "0.0.0.0:7702" "health_listen" "0.0.0.0:7802" "metrics_listen" "0.0.0.0:9702" "device" .model.device "threads" $threads
    "model_name" .model.name "kv_memory_mib" .model.kvMemoryMib "register_timeout_s" .model.startTimeoutS -}}
{{- $cache := dict "listen" "0.0.0.0:7701" "health_listen" "0.0.0.0:7801" "metrics_listen" "0.0.0.0:9701" -}}
{{- $tracing := include "octavo.tracingOptions" .root | fromJson -}}
{{- $cache = mergeOverwrite $cache $tls $tracing -}}
{{- $executor = mergeOverwrite $executor $tls $tracing -}}
{{- if $tls -}}
{{- $_ := set $executor "internal_tls_server_name" .root.Values.tls.internalServerName -}}
{{- end -}}
{{ include "octavo.tomlTable" (dict "name" "engine" "values" (dict
    "model" (include "octavo.modelReference" .model)
    "executors" .model.executors
    "spare_executors" .model.spareExecutors
    "start_timeout_s" .model.startTimeoutS)) | trim }}

{{ include "octavo.tomlTable" (dict "name" "cache_service" "values" (mergeOverwrite $cache .root.Values.engine.cacheService)) | trim }}

{{ include "octavo.tomlTable" (dict "name" "executor" "values" (mergeOverwrite $executor .model.executor)) | trim }}
{{- end -}}

{{/*
Seconds that an engine takes to end at most: executors, then the cache service, each its window, its grace and the ten
seconds after which the launcher kills it.
*/}}
{{- define "octavo.engineDrain" -}}
{{- $executor := .model.executor -}}
{{- $cache := .root.Values.engine.cacheService -}}
{{- $executorS := addf (dig "drain_accept_window_s" 0.5 $executor) (dig "drain_grace_s" 30.0 $executor) 10 -}}
{{- $cacheS := addf (dig "drain_accept_window_s" 0.0 $cache) (dig "drain_grace_s" 5.0 $cache) 10 -}}
{{- ceil (addf $executorS $cacheS .model.preStopSleepS) -}}
{{- end -}}

{{/* Where an executor's spares listen: behind all that serve at first, those of the first executor first. */}}
{{- define "octavo.spareExecutors" -}}
{{- $spares := int .model.spareExecutors -}}
{{- $addresses := list -}}
{{- range $spare := until $spares -}}
{{- $port := add 7702 (int $.model.executors) (mul $.executor $spares) $spare -}}
{{- $addresses = append $addresses (printf "%s:%d" $.host $port) -}}
{{- end -}}
{{- if $addresses }}, spare_executors = {{ $addresses | toJson }}{{ end -}}
{{- end -}}

{{/*
Every engine behind the routers, as lines of a TOML array: one for each executor of each pod, named after the model's id,
the pod's number and, where there are several, the executor's: llama-0, or llama-0.1. Where the number
of pods may grow, all that there may ever be: a router goes on trying one that is not there, and takes it up when it is.
*/}}
{{- define "octavo.routerEngines" -}}
{{- $root := .root -}}
{{- range $model := .models -}}
{{- $pods := ternary $model.autoscaling.maxReplicas $model.replicas $model.autoscaling.enabled | int -}}
{{- range $pod := until $pods }}
{{- $host := printf "%s-%d.%s.%s.svc.%s" $model.fullname $pod $model.fullname $root.Release.Namespace $root.Values.clusterDomain -}}
{{- range $executor := until (int $model.executors) }}
  { name = "{{ $model.id }}-{{ $pod }}{{ if gt (int $model.executors) 1 }}.{{ $executor }}{{ end }}", cache_service = "{{ $host }}:7701", executor = "{{ $host }}:{{ add 7702 $executor }}"{{ include "octavo.spareExecutors" (dict "model" $model "host" $host "executor" $executor) }} },
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
