"""What experiments were made for, and what they showed; ``bench.pages`` sets figures and pictures
beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The text of a page."""

    title: str
    claim: str
    verdict: str
    command: str


COMPARE = "jaxnorm compare"
FINDINGS = {
    "compare-mnist": Finding(
        "LeNet on MNIST at batch 128 and 8",
        "Batch norm trains fastest at batch 128 and falls behind at 8, where layer norm is "
        "slightly ahead of none (the tutorials).",
        "The order of the training losses reproduces at 128 and, for batch norm, at 8, where it is "
        "behind by a factor of two. Layer "
        "norm ends slightly ahead of none at 8. Test accuracies differ by less than their spread, "
        "but for batch norm at 8 with the "
        "statistics of eight images.",
        f"{COMPARE} mnist --data-dir DIR",
    ),
    "convolutions": Finding(
        "Norms after convolutions, Adam",
        "Layer norm after convolutions fails to converge (the tutorials); it speeds training up, "
        "but batch norm more (Ba et al. 2016).",
        "Under Adam at 1e-3 every norm trains, and the training losses of the first epoch lie "
        "within 0.02 of one another; instance "
        "norm is last, layer norm over height, width and channels first. The failure is of another "
        "choice of axes and optimizer: "
        "[under gradient descent](../convolutions-sgd/README.md).",
        f"{COMPARE} mnist --data-dir DIR --variants conv --norms "
        "none,batch,layer,layer-channels,instance,group,switchable "
        "--batch-sizes 128 --epochs 1",
    ),
    "convolutions-sgd": Finding(
        "Layer norm after convolutions, gradient descent",
        "Layer norm after convolutions fails to converge (the tutorials).",
        "It fails where statistics are over the channels alone (`layer-channels`, what a layer "
        "norm over the last axis is) and the "
        "optimizer is plain gradient descent: the loss stays at 2.3 in every seed of the deep "
        "network, and nearly so in two of three "
        "of the other. Over height, width and channels (`layer`) it "
        "trains as well as batch norm. The reason is in the black margins: at first all channels "
        "of a flat region are equal, their "
        "variance is 0, and the gradient is multiplied by 1 / sqrt(epsilon). The gradient of the "
        "first bias is then 114 long, without a "
        "norm 0.08; with epsilon 1e-2 it is 1.4, and the network trains "
        "([measured](../flat-regions.md)). Adam divides by that "
        "length, and does not notice.",
        f"{COMPARE} mnist --data-dir DIR --variants conv,deep --norms "
        "none,batch,layer,layer-channels --batch-sizes 128 --epochs 1 "
        "--seeds 3 --optimizer sgd --learning-rate 0.1",
    ),
    "vowels": Finding(
        "Utterances of 7 to 29 steps",
        "Recurrent batch norm keeps statistics for every step: late ones are those of few "
        "sequences, and a test sequence may be longer "
        "than any in training (the tutorials; Cooijmans et al. 2016 use the last step's statistics "
        "then).",
        "Both happen here: no training utterance has more than 26 steps. Recurrent batch norm "
        "trains far worse than the others (after "
        "40 epochs its loss is 10 to 32 times theirs) and tests worse for LSTM and RNN, level for "
        "the GRU; test batches' own statistics "
        "are worse still. Layer norm is level with none for GRU and RNN, and behind it for the "
        "LSTM (93.9 against 95.9 %).",
        f"{COMPARE} vowels --data-dir DIR",
    ),
    "sweep": Finding(
        "Batch sizes from 64 to 2, norms after the convolutions",
        "Batch norm's error rises as the batch shrinks, group norm's does not: 34.7 against 24.1 % "
        "at two images per GPU (Wu & He 2018).",
        "Not after these convolutions: down to two images batch norm still reduces over 512 and 32 "
        "elements per channel, which suffices "
        "for digits; from batch 4 on single seeds of any norm end badly at this learning rate. In "
        "the "
        "[dense part](../sweep-dense/README.md), where two images are two numbers, the claim "
        "reproduces.",
        f"{COMPARE} digits --variants conv --norms batch,layer,group,instance,switchable "
        "--batch-sizes 64,32,16,8,4,2 --epochs 10",
    ),
    "text": Finding(
        "Shakespeare by characters",
        "Layer norm speeds up recurrent networks (Ba et al. 2016); on Penn Treebank's characters "
        "it brings 1.312 to 1.267 bits (Cooijmans "
        "et al. 2016 and others).",
        "Much faster at the start: after three epochs an LSTM(128) needs 2.69 bits per character "
        "with layer norm and 3.38 without. That "
        "is early in the training of either, and no statement on where they end.",
        f"{COMPARE} text --data-dir DIR --seeds 3",
    ),
    "imdb": Finding(
        "Film reviews",
        "With layer norm an LSTM learns no faster, but more steadily, and overfits less (the "
        "tutorials).",
        "With initial gains of 1, as usual, it does not learn to read 200 words in two epochs; "
        "with 0.3 it begins more slowly than "
        "without a norm, and more steadily: all seeds reach 80 to 82 %, while without a norm one "
        "of three is stuck at 59 %, the "
        "others at 83 and 85 %. It overfits less (training and test loss are 0.43 and 0.45; "
        "without a norm, where it learns, 0.28 and "
        "0.38). No loss is ever NaN: padding is not read. The reason is that gains of 1 make a "
        "chaotic map of the "
        "network: at its start the gradient grows 9300 fold on its way from the last word to the "
        "first, at 0.3 it does not grow "
        "([measured](../gradient-growth.md)). Long sequences want small initial gains.",
        f"{COMPARE} imdb --data-dir DIR --epochs 2 --seeds 3",
    ),
    "sequential": Finding(
        "Digits read by rows and by pixels",
        "Layer norm speeds up recurrent networks (Ba et al. 2016), recurrent batch norm too "
        "(Cooijmans et al. 2016).",
        "By rows layer norm does, for LSTM and GRU and in every seed: the LSTM ends at half the "
        "training loss. The simple RNN trains "
        "faster without. Recurrent batch norm starts with gains of 0.1, and slowest; for the LSTM "
        "it overtakes none in every seed, in "
        "training and in tests. By pixels, 64 steps of 16 features, it trains LSTM and RNN fastest "
        "in every seed. The RNN then tells "
        "most digits, the LSTM only by the test batches' own statistics (79 against 64 % without a "
        "norm): running ones of 66 batches "
        "are not enough. Layer norm is last there; [smaller gains, another placement and single "
        "pixels](../permuted/README.md) are "
        "measured apart.",
        f"{COMPARE} sequential --seeds 3",
    ),
    "sequential-mnist": Finding(
        "MNIST read row by row",
        "Recurrent batch norm reads MNIST better than none (99.0 against 98.9 % by pixels, "
        "Cooijmans et al. 2016).",
        "So it does by rows, after three epochs and by its running statistics: 97.1 to 97.5 "
        "against 96.0 to 96.8 %, ahead in every seed; "
        "in training it is level. Layer norm is between. States start with noise there, as its "
        "authors' do: hardly a digit reaches into "
        "the first rows, so that without it all states of a batch are the same, variances are 0, "
        "and running statistics tell half of the "
        "digits. [By pixels](../permuted-mnist/README.md) training then ends in NaN.",
        f"{COMPARE} sequential-mnist --data-dir DIR --seeds 3",
    ),
    "handwriting": Finding(
        "Drawings by pen",
        "Layer norm improves the likelihood of handwriting, -1055 to -1096 nats on IAM (Ba et al. "
        "2016).",
        "After two epochs of Omniglot's drawings (at most 100 points) a drawing takes 24.8 nats "
        "with layer norm and 27.9 without, in "
        "units in which offsets have deviation 1; layer norm is ahead in training in every seed, "
        "in tests in two of three. That is "
        "early in the training of either.",
        f"{COMPARE} handwriting --data-dir DIR --epochs 2 --seeds 3",
    ),
    "draw": Finding(
        "DRAW",
        "Layer norm brings DRAW's bound from 82.36 to 82.09 nats, and there twice as fast (Ba et "
        "al. 2016).",
        "Not at this size: with LSTMs of 128, eight steps and two epochs the network without a "
        "norm is ahead in every seed, 118.7 "
        "against 123.9 nats. The paper's network has 256 units, 64 steps and attention, and 200 "
        "epochs.",
        f"{COMPARE} draw --data-dir DIR --epochs 2 --seeds 3",
    ),
    "sweep-dense": Finding(
        "Batch sizes from 64 to 2, norms in the dense part",
        "Batch norm's error rises as the batch shrinks, group norm's does not: 34.7 against 24.1 % "
        "at two images per GPU (Wu & He 2018).",
        "Reproduces. At 64 batch norm trains like layer and group norm; at 8 its training loss is "
        "18 times theirs, at 2 it hardly "
        "trains, and recognizes four digits of five where the others recognize 98 %. Statistics of "
        "the test batches are worse than running "
        "ones from 32 on.",
        f"{COMPARE} digits --norms none,batch,layer,group --batch-sizes 64,32,16,8,4,2 --epochs 10",
    ),
    "explain": Finding(
        "Why norms help",
        "Batch norm makes the loss smoother along the gradient rather than reducing internal "
        "covariate shift (Santurkar et al. 2018); "
        "weights before a norm have no scale, and learn more slowly as they grow (Ba et al. 2016); "
        "switchable norm gives batch "
        "statistics less weight in small batches (Luo et al. 2018).",
        "With batch norm the loss varies a third as much along the gradient as without a norm, and "
        "the gradient moves less; with layer "
        "and group norm both vary more than without, for these small networks after three seeds "
        "(of the first alone one would have said "
        "half as much for all). The gradient changes as much per length with each. Only batch norm "
        "holds the inputs of the nonlinearities "
        "in place; no norm reduces the shift of gradients, as Santurkar et al. found. Scale "
        "invariance is exact. The blend hardly leaves "
        "its start in some 1300 steps, whatever the batch: that it turns from the batch's "
        "statistics does not show here.",
        "jaxnorm explain --variant conv --seeds 3",
    ),
    "permuted": Finding(
        "Digits read pixel by pixel: in order, embedded, permuted",
        "Normalization helps LSTMs on permuted pixels most: 90.2 to 95.4 % on MNIST with recurrent "
        "batch norm (Cooijmans et al. 2016).",
        "Layer norm as in Ba et al. 2016 hinders here, in either order, with gains of 1 and of "
        "0.3: it normalizes W x over the units, and "
        "where x is a single number that leaves the sign of x alone, so that a pixel is black or "
        "not. With the norm over the sum of both "
        'terms (placement "sum", here layer-sum) it does not: in order it tests better than '
        "without a norm in every seed, permuted about "
        "as well. Embedded first, in 16 features, pixels keep their brightness: its training loss "
        "falls, with gains of 0.3 by a third, "
        "but so does that without a norm, which stays ahead. [MNIST](../permuted-mnist/README.md) "
        "has twelve times as many steps.",
        f"{COMPARE} sequential --variants lstm-pixels,lstm-embedded,lstm-permuted --norms "
        "none,layer,layer-0.3,layer-sum --epochs 20 "
        "--learning-rate 1e-3 --seeds 3",
    ),
    "permuted-mnist": Finding(
        "MNIST read pixel by pixel, in order and permuted",
        "Recurrent batch norm learns pixels faster and better: 99.0 against 98.9 % in order, 95.4 "
        "against 90.2 % permuted (Cooijmans et "
        "al. 2016).",
        "Faster, in every seed and either order: after two epochs 52 to 71 against 11 to 44 % in "
        "order, 68 to 73 against 36 to 64 % "
        "permuted, by running statistics. Without a norm losses rise again on the way (nothing is "
        "clipped here; the paper clips "
        "gradients). States start with noise of deviation 0.1, as its authors' do: the first "
        "pixels are black in all images, and from "
        "equal states training ends in NaN. Layer norm, over the sum of both terms since pixels "
        "are single numbers, hardly learns over "
        "784 steps, where it kept up [over 64](../permuted/README.md). Two epochs are far from "
        "convergence.",
        f"{COMPARE} sequential-mnist --data-dir DIR --variants lstm-pixels,lstm-permuted --norms "
        "none,layer-sum,batch --epochs 2 "
        "--seeds 3 --jobs 2",
    ),
    "pimnist": Finding(
        "MNIST without places",
        "Layer norm is robust to the batch size and faster than batch norm, at 128 and at 4 (Ba et "
        "al. 2016, section 6.6).",
        "Robust it is: at batch 4 batch norm's training loss is more than twice that of layer "
        "norm, which tests best at both sizes by its "
        "mean loss, if not in every seed. At 128 batch norm trains faster in this single epoch of "
        "20,000 digits, unlike there.",
        f"{COMPARE} pimnist --data-dir DIR --epochs 1 --train-examples 20000 --seeds 3",
    ),
    "imdb-glove": Finding(
        "Film reviews, given word vectors",
        "With layer norm an LSTM learns no faster, but more steadily, and overfits less (the "
        "tutorials).",
        "Not with gains of 1. With vectors that are not trained two seeds of three learn about as "
        "fast as without a norm, the third is "
        "far behind after two epochs of 16,000 reviews (60 against 71 to 74 %). With [vectors that "
        "are learned](../imdb/README.md) none "
        "learns, and gains of 0.3 are steadier.",
        f"{COMPARE} imdb --data-dir DIR --variants lstm-glove --norms none,layer --epochs 2 "
        "--train-examples 16000 --seeds 3",
    ),
    "vit": Finding(
        "Vision transformer on digits",
        "Transformers with dynamic tanh match those with layer norm, mostly without other settings "
        "(Zhu et al. 2025).",
        "At this rate they do: 96.7 against 96.0 % of 360 test digits, which is near the "
        "spread, at like training losses. Dynamic tanh starts slower: in the fourth epoch its "
        "loss is 1.1 to 1.3, that of layer norm 0.5 to 0.7. RMS norm trains as well and tests "
        "worse (92.7 %); without a norm accuracies spread most (90.3 to 97.5 %). QK norm has no "
        "clear effect: it raises the mean accuracy for none and RMS norm and lowers it for the "
        "others, by one or two points. It is [at three times the rate](../vit-high/README.md) "
        "that it matters. The rate of 1e-2 was chosen after one seed at 1e-3, where three of "
        "the four networks without QK norm tested worse.",
        f"{COMPARE} vit --seeds 3",
    ),
    "vit-high": Finding(
        "Vision transformer at a high learning rate",
        "QK norm keeps training stable at rates where it otherwise diverges (Dehghani et al. 2023; "
        "Wortsman et al. 2023).",
        "So it is at 3e-2, three times the rate of [the other page](../vit/README.md). With "
        "dynamic tanh no seed learns without QK norm: the loss stays at log 10 and the accuracy at "
        "5.8 %, the share of one digit in the test set. With QK norm every seed learns (88.1 to "
        "96.4 %). With layer norm the training loss falls from 0.29 to 0.11 by QK norm, without a "
        "norm from 0.42 to 0.24; both also train without. All means are behind those at 1e-2.",
        f"{COMPARE} vit --norms none,layer,dynamic_tanh --seeds 3 --learning-rate 3e-2",
    ),
    "denoise": Finding(
        "Diffusion transformer on digits",
        "A diffusion transformer is best with adaLN-Zero, then with adaLN, and worst with the "
        "condition as tokens (Peebles & Xie 2022).",
        "The same order of the mean test losses, with small distances: 0.221, 0.223 and 0.232 with "
        "layer norm. The token is behind adaLN-Zero in every seed, adaLN in two of three, by 0.003 "
        "and 0.005; in the third they are level. Layer and RMS norm are level throughout, and "
        "without a norm the loss is 0.235. The test set's noise is the same for all. The networks "
        "are not equally large: 43,000 parameters with adaLN-Zero, 39,000 with adaLN, 29,000 with "
        "a token. `AdaLayerNorm` starts from a modulation of zeros, too. No images were drawn.",
        f"{COMPARE} denoise --seeds 3",
    ),
}
